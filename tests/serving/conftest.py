import pytest

from tests.serving.inside import Inside, embedded, inside


@pytest.fixture(scope="package")
def server(compile_cache) -> Inside:
    """One for all tests that leave it as it is."""
    with inside(lambda: embedded(compile_cache)) as there:
        yield there
