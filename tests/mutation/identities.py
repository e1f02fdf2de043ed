"""Mutants of the identity and of the weights' digest."""

from tests.mutation.mutant import of

IDENTITY = of(
    "identity.py",
    (
        "the package's source is no part of the identity",
        'found.update(f"{package.name}/{path.relative_to(package).as_posix()} {len(content)}\\n".encode() + content)',
        "found.update(path.name.encode())",
        "test_identity.py::test_e2_another_process",
    ),
    (
        "a template is a template",
        "xxhash.xxh3_128_hexdigest(template.encode()) if",
        '"some" if',
        "test_identity.py::test_e1_e2_another_file_of_the_same_name",
    ),
    ("of a flag that is set twice one value counts", "(flags.get(name), value,", "(value,", "test_identity.py::test_xla_flags"),
    (
        "a flag that moves no bit counts",
        "if not IDLE.search(name):",
        "if True:",
        "test_identity.py::test_it_is_a_text_by_name",
    ),
)

PROGRAMS = of(
    "programs.py",
    (
        "what is kept does not outlive another pool",
        "replace(self.shapes, pool_pages=2, sequence_pages=2)",
        "replace(self.shapes)",
        "test_identity.py::test_how_much_room_there_is_changes_neither_identity_nor_bits",
    ),
    (
        "programs that see no page are not in the digest",
        "if not _is_paged(key):",
        "if False:",
        "test_identity.py::test_a_program_that_is_lowered_otherwise",
    ),
)

DIGEST = of(
    "model/digest.py",
    ("a file whose size and time are put back is the same", "s.st_ctime_ns,", "0,", "test_digest.py::test_e1_another_byte_is_another_digest"),
    (
        "a kept digest is taken for other files",
        "and kept == self._record(digest)",
        "",
        "test_digest.py::test_a_copy_has_the_same_digest_of_its_own",
        "test_digest.py::test_a_kept_digest_that_is_damaged_is_made_anew",
        "test_digest.py::test_e1_another_byte_is_another_digest",
    ),
    (
        "a digest of files that have just changed is kept",
        "> time.time_ns() - FRESH * 1e9:",
        "> time.time_ns():",
        "test_digest.py::test_of_a_file_that_has_just_changed_it_is_not_kept",
    ),
    (
        "files that changed since they were loaded are read",
        "        if not self._unchanged():\n            return None\n        if self.keep and",
        "        if self.keep and",
        "test_digest.py::test_files_that_changed_since_they_were_loaded",
    ),
    (
        "files may change while they are read",
        "if digest is None or not self._unchanged():",
        "if digest is None:",
        "test_digest.py::test_files_that_change_while_they_are_read",
    ),
)

GOLDEN = of(
    "probe.py",
    ("golden has no steps", "for cuts in ((), CUTS)", "for cuts in ((), ())", "test_probe.py::test_golden_has_the_steps_and_what_they_leave"),
    (
        "golden has one of the two runs",
        'for kind, run in (("whole", whole), ("cut", cut))',
        'for kind, run in (("whole", whole),)',
        "test_probe.py::test_golden_has_the_steps_and_what_they_leave",
    ),
)

IDENTITY_MUTANTS = (*IDENTITY, *PROGRAMS, *DIGEST, *GOLDEN)
