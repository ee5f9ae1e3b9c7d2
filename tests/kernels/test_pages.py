"""A page of keys and values, read, and written to another place or another backend: the same bits follow."""

import numpy as np
import pytest

from batchgen.kernels.base import Backend
from tests.kernels.conftest import require
from tests.kernels.kernel_programs import VARIANTS, Variant, same_bits
from tests.tiny_model import LIMITS, Chunk, build_backend, make_batch, tiny_config

CONFIG = tiny_config(head_dim=48)  # padded to 64 in the cache
PAGE = LIMITS.page_size
PROMPT = np.random.default_rng(4).integers(0, CONFIG.shape.vocab_size, 2 * PAGE + 9)
REFERENCES = [Variant("reference", "fp32", kv) for kv in ("fp32", "int8")]


@pytest.fixture(params=[*VARIANTS, *REFERENCES], ids=str)
def load(request):
    """Opens backends of one kernel, weight and KV type."""
    if request.param.kernel != "reference":
        require(request.param.kernel)
    opened: list[Backend] = []

    def load_one(page_size: int = PAGE) -> Backend:
        limits = LIMITS if page_size == PAGE else type(LIMITS)(256, 32, 32, page_size)
        opened.append(build_backend(*request.param.names, config=CONFIG, limits=limits))
        return opened[-1]

    yield load_one
    for backend in opened:
        backend.close()


def rest(backend: Backend, pages: list[int], page_size: int = PAGE) -> np.ndarray:
    """Logits after the prompt, of which the first two pages (of 32 tokens) are in the cache."""
    chunk = Chunk(PROMPT[2 * PAGE :], 2 * PAGE, pages)
    return backend.run(make_batch([chunk], True, page_size, cleared_pages=np.array(pages[-1:]))).logits[:1].copy()


def fill(backend: Backend, pages: list[int], page_size: int = PAGE) -> None:
    batch = make_batch([Chunk(PROMPT[: 2 * PAGE], 0, pages)], False, page_size, cleared_pages=np.array(pages))
    backend.run(batch)


def test_a_page_has_as_many_bytes_as_are_counted(load):
    backend = load()
    data = backend.read_page(3)
    assert (data.dtype, data.shape) == (np.uint8, (backend.page_bytes(CONFIG.shape, PAGE),))


def test_a_prefix_in_other_pages_gives_the_same_bits(load):
    backend = load()
    fill(backend, [5, 2])
    expected = rest(backend, [5, 2, 9])
    saved = [backend.read_page(page) for page in (5, 2)]
    for page in (5, 2):
        backend.write_page(page, np.full_like(saved[0], 255))  # NaN in floats
    assert not same_bits(rest(backend, [5, 2, 9]), expected)
    for page, data in zip((40, 63), saved, strict=True):
        backend.write_page(page, data)
    assert same_bits(rest(backend, [40, 63, 9]), expected)


def test_a_prefix_in_another_backend_gives_the_same_bits(load):
    one, two = load(), load()
    fill(one, [0, 1])
    for source, target in ((0, 7), (1, 4)):
        two.write_page(target, one.read_page(source))
    assert same_bits(rest(two, [7, 4, 1]), rest(one, [0, 1, 2]))


def test_large_pages_move_as_a_whole(load):
    one, two = load(64), load(64)
    fill(one, [3], 64)
    two.write_page(1, one.read_page(3))
    assert same_bits(rest(two, [1, 0], 64), rest(one, [3, 0], 64))


def test_only_the_named_page_changes(load):
    backend = load()
    before = [backend.read_page(page) for page in range(LIMITS.num_pages)]
    data = np.random.default_rng(0).integers(0, 256, len(before[0])).astype(np.uint8)
    backend.write_page(6, data)
    for page, old in enumerate(before):
        assert same_bits(backend.read_page(page), data if page == 6 else old), page


def test_what_was_read_does_not_change_with_the_page():
    """Also where a page is contiguous: one layer, and one page alone."""
    config, limits = tiny_config(num_layers=1), type(LIMITS)(32, 1, 1, 32)
    for kernel in ("reference", "portable"):
        backend = build_backend(kernel, config=config, limits=limits)
        before = backend.read_page(0)
        backend.write_page(0, before + np.uint8(1))
        assert not before.any()
        backend.close()


@pytest.mark.parametrize("size", [0, 1, -4, 4])
def test_data_of_another_size_is_refused(load, size):
    backend = load()
    data = np.zeros((len(backend.read_page(0)) + size) * (size != 0), np.uint8)
    with pytest.raises(ValueError):
        backend.write_page(0, data)
    assert not backend.read_page(0).any()
