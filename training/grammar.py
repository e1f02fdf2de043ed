"""Words and small grammars: names of facts, their values, chatter, and the long outputs of tools. All text is made here."""

import zlib

KINDS = "code key room gate port desk box lane pin tag shelf locker ticket badge seat crate build batch order ref".split()
THINGS = "color city animal fruit tree river metal bird stone flower".split()
OWNERS = (
    "deploy backup door garden north south east west red blue green gold silver old new main spare guest staff night day first second third last "
    "upper lower inner outer winter summer spring autumn market harbor tower bridge school office library kitchen garage station server database "
    "release staging test billing mail cache login user admin client project team travel flight train hotel museum"
).split()
WORDS = {
    "color": "amber teal violet crimson olive ivory coral indigo beige scarlet maroon lilac copper azure".split(),
    "city": "Oslo Lima Cairo Paris Tokyo Delhi Rome Quito Dakar Perth Turin Lyon Hanoi Accra".split(),
    "animal": "otter badger falcon lynx heron tiger panda rabbit moose gecko bison camel weasel beaver".split(),
    "fruit": "apple mango cherry lemon papaya plum quince peach banana melon guava grape lychee date".split(),
    "tree": "maple cedar birch willow poplar spruce walnut linden juniper acacia laurel hazel aspen elm".split(),
    "river": "Danube Nile Volga Rhine Indus Loire Tiber Ganges Mekong Congo Seine Tagus Oder Vistula".split(),
    "metal": "iron nickel cobalt zinc titanium tungsten lead mercury bronze steel brass chrome".split(),
    "bird": "robin sparrow crane magpie swift osprey pelican raven finch thrush plover wren".split(),
    "stone": "granite marble basalt slate quartz onyx jasper flint opal topaz garnet pumice".split(),
    "flower": "tulip daisy orchid lotus iris dahlia poppy jasmine violet clover aster peony".split(),
}
SUBJECTS = ("the worker|the server|the client|a user|the team|the engine|the parser|the writer|the reader|the garden|the river|the market").split("|")
VERBS = ("reads|writes|keeps|moves|checks|loads|sends|counts|opens|closes|finds|holds|sorts|copies|drops|joins").split("|")
OBJECTS = ("the file|a page|the list|every line|the table|some rows|the cache|a block|the index|the door|the letter|the old map|a small stone").split(
    "|"
)
TAILS = (
    "in the morning|at night|after lunch|with care|again|without delay|before the next step|near the bridge|for the team|on every run|once a day"
).split("|")
FOLDERS = "src tests docs notes data tools build core web config".split()
FILES = "main util reader writer parser model table index cache queue server client report plan".split()
ENDINGS = "py md txt json log toml".split()
LEVELS = "INFO INFO INFO DEBUG WARN".split()
EVENTS = ("request done|cache hit|cache miss|page loaded|worker started|worker stopped|retry later|block written|queue empty|lease renewed").split(
    "|"
)
ONSETS, VOWELS, CODAS = "b d f g k l m n p r s t v z".split(), "a e i o u".split(), " l n r s t k".split(" ")


def held_out(code):
    """True for the tenth of all digit codes that training never shows as a value."""
    return zlib.crc32(code.encode()) % 10 == 0


def digits(rng, held=False, length=None):
    """A digit code, held out from training or not."""
    while True:
        n = length or rng.choice((3, 4, 4, 4, 4, 5, 6))
        code = "".join(rng.choice("0123456789") for _ in range(n))
        if held_out(code) == held:
            return code


def pseudo(rng):
    """A pronounceable word that no list holds."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((2, 2, 3))))


def fact(rng, used, held=False):
    """A (name, value) pair whose name is new in `used`."""
    while True:
        thing = rng.choice(THINGS) if rng.random() < 0.3 else rng.choice(KINDS)
        owner = rng.choice(OWNERS) if rng.random() < 0.93 else pseudo(rng)
        name = thing if rng.random() < 0.06 else f"{owner} {thing}"
        if name not in used:
            used.add(name)
            break
    if rng.random() < 0.06:
        return name, pseudo(rng)
    return name, rng.choice(WORDS[thing]) if thing in WORDS else digits(rng, held)


def sentence(rng):
    """One sentence of prose."""
    s = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}"
    if rng.random() < 0.6:
        s += f" {rng.choice(TAILS)}"
    if rng.random() < 0.25:
        s += f" and {rng.choice(VERBS)} {rng.choice(OBJECTS)}"
    return s[0].upper() + s[1:] + "."


def prose(rng, chars):
    """Sentences of about `chars` characters in all."""
    out, size = [], 0
    while size < chars:
        out.append(sentence(rng))
        size += len(out[-1]) + 1
    return " ".join(out)


def path(rng):
    """A file path."""
    return f"{rng.choice(FOLDERS)}/{rng.choice(FILES)}{rng.choice(('', '', '_' + rng.choice(FILES)))}.{rng.choice(ENDINGS)}"


def log(rng, chars):
    """Log lines with a time, a level, an event and sometimes a number."""
    out, size, minute = [], 0, rng.randrange(1200)
    while size < chars:
        minute += rng.choice((0, 0, 1, 2))
        line = f"{minute // 60:02d}:{minute % 60:02d} {rng.choice(LEVELS)} {rng.choice(FILES)}: {rng.choice(EVENTS)}"
        if rng.random() < 0.4:
            line += f" in {rng.randrange(2, 900)} ms"
        out.append(line)
        size += len(line) + 1
    return "\n".join(out)


def listing(rng, chars):
    """A file listing, one path a line with its size."""
    out, size = [], 0
    while size < chars:
        out.append(f"{path(rng)} {rng.randrange(1, 99)} kB")
        size += len(out[-1]) + 1
    return "\n".join(out)


def code(rng, chars):
    """Python-like functions."""
    out, size = [], 0
    while size < chars:
        a, b, c = rng.choice(FILES), rng.choice(FILES), rng.choice(VERBS)
        lines = [f"def {a}_{b}(rows, limit={rng.randrange(2, 64)}):", f'    """{sentence(rng)}"""', f"    out = [{c}(row) for row in rows[:limit]]"]
        if rng.random() < 0.5:
            lines.append(f"    if not out:\n        return {b}()")
        out.append("\n".join([*lines, "    return out\n"]))
        size += len(out[-1]) + 1
    return "\n".join(out)


def settings(rng, facts):
    """Lines of a settings file that state `facts` (name, value)."""
    return "\n".join(f"{name} = {value}" for name, value in facts)
