"""The tiers of a job's KV cache below the device, as its spec asks for them."""

import hashlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import batchgen
from batchgen.engine.cache_tiers import CacheTiers, HostMemory, KeyChain, Store, Stores, TierPolicy, prefix_root
from batchgen.errors import SpecError
from batchgen.io.blob_store import CHECKSUM_BYTES, BlobStore
from batchgen.kernels.base import Backend
from batchgen.spec import CacheSpec, size_bytes


def open_tiers(
    spec: CacheSpec,
    backend: Backend,
    numerics: Mapping[str, str | bool],
    page_size: int,
    page_bytes: int,
    on_message: Callable[[str], None],
) -> CacheTiers | None:
    """None when there is no tier. `numerics` is what decides the bits of a page beside code, layout and tokens.

    SpecError for a tier that is too small for one page.
    """
    stores = _stores(spec, backend, page_bytes, on_message)
    if not stores:
        return None
    sizes = {"page_size": page_size, "page_bytes": page_bytes}
    root = prefix_root({**numerics, **sizes, "kv_layout": backend.kv_layout, "code": code_hash()})
    policy = TierPolicy(
        write="back" if spec.write == "auto" else spec.write,
        prefetch=spec.prefetch,
        async_backup=spec.async_backup,
        restore_wait_s=spec.restore_wait_ms / 1000,
    )
    return CacheTiers(Stores(stores), KeyChain(root, page_size), page_bytes, backend.read_page, policy, on_message)


def _stores(spec: CacheSpec, backend: Backend, page_bytes: int, on_message: Callable[[str], None]) -> list[Store]:
    """The fastest first."""
    stores: list[Store] = []
    if spec.host_bytes is not None and backend.host_memory:
        on_message("engine.cache.host_bytes: the KV cache lies in host memory already, so there is no tier in between")
    elif spec.host_bytes is not None:
        stores.append(HostMemory(_room("host_bytes", spec.host_bytes, page_bytes)))
    if spec.disk_path is not None:
        room = _room("disk_bytes", spec.disk_bytes, page_bytes + CHECKSUM_BYTES)
        stores.append(BlobStore(Path(spec.disk_path), room))
    return stores


def _room(name: str, size: int | str, least: int) -> int:
    count = size_bytes(size)
    if count < least:
        raise SpecError(f"engine.cache.{name}: {count} bytes is less than one page of this model, {least} bytes")
    return count


def code_hash() -> str:
    """SHA-256 (hex) of all that computes here: another kernel, decoder or reader of weights may give other bits."""
    digest = hashlib.sha256(f"numba {version('numba')}, numpy {version('numpy')}".encode())
    folder = Path(batchgen.__file__).parent
    for source in sorted(folder.rglob("*.py")):
        content = source.read_bytes()
        digest.update(f"\0{source.relative_to(folder)} {len(content)}\0".encode() + content)
    return digest.hexdigest()
