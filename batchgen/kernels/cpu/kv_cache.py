"""The paged KV cache in memory: where a token's keys and values lie, and how they get there.

A block holds the keys, then the values, of 32 slots of one KV head. In the layout for tiles (`kv_amx`) keys are
(2 halves, dim/32, 16 keys, 32 dims) and values (dim, 32 keys), left operands of a tile product as they lie; in the
layout for vectors keys are (dim, 32 keys) and values (32 keys, dim). Elements are float32, bfloat16, or int8 codes
followed by float32 scales (groups, 32 slots): a group of a head's dimensions shares a scale, absmax / 127.
"""

import numpy as np

from batchgen.kernels.cpu import simd
from batchgen.kernels.cpu.compiling import helper, inlined

KV_F32, KV_BF16, KV_INT8 = range(3)


@inlined
def element_size(model):
    if model.kv_type == KV_INT8:
        return 1
    return 2 if model.kv_type == KV_BF16 else 4


@inlined
def block_bytes(model):
    """Bytes of the keys, or of the values, of one block of one KV head."""
    scales = model.kv_groups * 128 if model.kv_type == KV_INT8 else 0
    return model.dim * 32 * element_size(model) + scales


@inlined
def block_address(model, layer, page, offset, kv_head):
    """Address of the keys of the 32-slot block that holds slot `offset` of a page; its values follow."""
    blocks = model.page_size // 32
    index = ((np.int64(layer) * model.pages + page) * blocks + offset // 32) * model.kv_heads + kv_head
    return model.kv + index * 2 * block_bytes(model)


@inlined
def scale_address(model, elements, dimension, slot):
    """Address of the scale of a slot's dimension, where the codes begin at `elements`."""
    group = dimension * model.kv_groups // model.dim
    return elements + model.dim * 32 + (group * 32 + slot) * 4


@inlined
def key_place(model, elements, slot, dimension):
    """Address of one element of a key; in the layout for tiles 32 dimensions lie side by side."""
    size = element_size(model)
    if model.kv_amx:
        tile = slot // 16 * (model.dim // 32) + dimension // 32
        return elements + (tile * 512 + slot % 16 * 32 + dimension % 32) * size
    return elements + (dimension * 32 + slot) * size


@inlined
def value_place(model, elements, slot, dimension):
    """Address of one element of a value."""
    if model.kv_amx:
        return elements + (dimension * 32 + slot) * element_size(model)
    return elements + (slot * model.dim + dimension) * element_size(model)


@inlined
def copy_bytes(source, target, count):
    """Copy `count` bytes, the largest pieces first."""
    while count >= 8:
        simd.write_i64(target, simd.read_i64(source))
        source, target, count = source + 8, target + 8, count - 8
    if count >= 4:
        simd.write_i32(target, simd.read_i32(source))
        source, target, count = source + 4, target + 4, count - 4
    if count >= 2:
        simd.write_u16(target, simd.read_u16(source))
        source, target, count = source + 2, target + 2, count - 2
    if count:
        simd.write_u8(target, simd.read_u8(source))


@helper
def store_row(model, elements, slot, row, packed):
    """Convert one token's `dim` float32 at `row` to the cache's type at `packed`; scales go to their place."""
    if model.kv_type == KV_F32:
        for i in range(0, model.dim * 4, 64):
            simd.store(packed + i, simd.load(row + i))
    elif model.kv_type == KV_BF16:
        for i in range(0, model.dim, 16):
            simd.store_bf16(packed + i * 2, simd.load(row + i * 4))
    else:
        width = model.dim // model.kv_groups
        for group in range(0, model.dim, width):
            largest, poison = simd.zero(), simd.zero()
            for i in range(group * 4, (group + width) * 4, 64):
                largest = simd.maximum(largest, simd.absolute(simd.load(row + i)))
                poison = simd.fma(simd.load(row + i), simd.zero(), poison)  # not zero when something is not finite
            top = simd.reduce_max(largest)
            scale = top * np.float32(1 / 127) + simd.reduce_add(poison)
            simd.write_f32(scale_address(model, elements, group, slot), scale)
            inverse = simd.inverse_scale(simd.broadcast(top))
            for i in range(group, group + width, 16):
                simd.store_i8(packed + i, simd.load(row + i * 4) * inverse)


@helper
def write_key(model, block, slot, row, packed):
    """A key, `dim` float32 at `row`, into its place in a block."""
    store_row(model, block, slot, row, packed)
    size = element_size(model)
    width = 32 if model.kv_amx else 1
    for i in range(0, model.dim, width):
        copy_bytes(packed + i * size, key_place(model, block, slot, i), width * size)


@helper
def write_value(model, block, slot, row, packed):
    """A value in the layout for vectors."""
    values = block + block_bytes(model)
    store_row(model, values, slot, row, packed)
    copy_bytes(packed, value_place(model, values, slot, 0), model.dim * element_size(model))


@helper
def write_values(model, block, slot, count, source, stride, head_dim, columns):
    """Values of `count` (up to 16) consecutive slots in the layout for tiles.

    They are transposed to `columns` (dim, 16) float32 first; rows of `source` are `stride` bytes apart.
    """
    values, size = block + block_bytes(model), element_size(model)
    for i in range(0, head_dim, 16):
        simd.transpose(source + i * 4, stride, columns + i * 64, 64)
    for i in range(head_dim * 64, model.dim * 64, 64):
        simd.store(columns + i, simd.zero())
    packed, inverse = columns + model.dim * 64, simd.zero()
    width = model.dim // model.kv_groups
    for i in range(model.dim):
        if model.kv_type == KV_INT8 and i % width == 0:
            largest, poison = simd.zero(), simd.zero()
            for j in range(i * 64, (i + width) * 64, 64):
                largest = simd.maximum(largest, simd.absolute(simd.load(columns + j)))
                poison = simd.fma(simd.load(columns + j), simd.zero(), poison)
            simd.store(packed, largest * simd.broadcast(np.float32(1 / 127)) + poison)
            copy_bytes(packed, scale_address(model, values, i, slot), count * 4)
            inverse = simd.inverse_scale(largest)
        place = value_place(model, values, slot, i)
        value = simd.load(columns + i * 64)
        if model.kv_type == KV_INT8:
            simd.store_i8(packed, value * inverse)
        else:
            simd.store_bf16(packed, value)
        copy_bytes(packed, place, count * size)


@helper
def fetch_values(model, block, slot):
    """Bring the lines that `write_values` will write into the cache."""
    values = block + block_bytes(model)
    for i in range(0, model.dim, 1 if model.kv_type == KV_BF16 else 2):
        simd.prefetch_write(value_place(model, values, slot, i))


@helper
def keys_on_tiles(model, block, room):
    """Address of a block's keys in bfloat16, expanded into `room` unless they are."""
    if model.kv_type == KV_BF16:
        return block
    source, target = block, room
    for half in range(2):
        for i in range(0, model.dim, 32):
            scales = scale_address(model, block, i, half * 16)
            for _ in range(16):  # keys lie one after the other, see `key_place`
                scale = simd.broadcast(simd.read_f32(scales))
                simd.expand_i8(source, scale, scale, target)
                source, target, scales = source + 32, target + 64, scales + 4
    return room


@helper
def values_on_tiles(model, block, room):
    """The same for a block's values."""
    values = block + block_bytes(model)
    if model.kv_type == KV_BF16:
        return values
    width = model.dim // model.kv_groups
    source, target = values, room
    for group in range(0, model.dim, width):
        scales = scale_address(model, values, group, 0)
        left, right = simd.load(scales), simd.load(scales + 64)
        for _ in range(width):
            simd.expand_i8(source, left, right, target)
            source, target = source + 32, target + 64
    return room


@helper
def expand_keys(model, block, room):
    """int8 keys in the layout for vectors to float32 in the same layout."""
    for i in range(model.dim):
        scales = scale_address(model, block, i, 0)
        for j in range(0, 32, 16):
            simd.store(room + (i * 32 + j) * 4, simd.load_i8(block + i * 32 + j) * simd.load(scales + j * 4))


@helper
def expand_values(model, values, room):
    for slot in range(32):
        for i in range(0, model.dim, 16):
            scale = simd.broadcast(simd.read_f32(scale_address(model, values, i, slot)))
            simd.store(room + (slot * model.dim + i) * 4, simd.load_i8(value_place(model, values, slot, i)) * scale)


@helper
def copy_slots(model, layer, source, target, count):
    """Copy one layer's keys and values of `count` neighbouring tokens of a block to slots of another block."""
    size, half = element_size(model), block_bytes(model)
    s, t = source % 32, target % 32
    for h in range(model.kv_heads):
        a = block_address(model, layer, source // model.page_size, source % model.page_size, h)
        b = block_address(model, layer, target // model.page_size, target % model.page_size, h)
        if model.kv_amx:
            for i in range(count):
                for d in range(0, model.dim, 32):
                    copy_bytes(key_place(model, a, s + i, d), key_place(model, b, t + i, d), 32 * size)
            for d in range(model.dim):
                copy_bytes(value_place(model, a + half, s, d), value_place(model, b + half, t, d), count * size)
        else:
            for d in range(model.dim):
                copy_bytes(key_place(model, a, s, d), key_place(model, b, t, d), count * size)
            length = count * model.dim * size
            copy_bytes(value_place(model, a + half, s, 0), value_place(model, b + half, t, 0), length)
        if model.kv_type == KV_INT8:
            for d in range(0, model.dim, model.dim // model.kv_groups):
                copy_bytes(scale_address(model, a, d, s), scale_address(model, b, d, t), count * 4)
                copy_bytes(scale_address(model, a + half, d, s), scale_address(model, b + half, d, t), count * 4)


@helper
def clear_page(model, page, layer):
    """Zero a new page's values: attention multiplies the slots past a sequence's end by zero, and 0 * NaN is NaN."""
    zero = simd.zero()
    for offset in range(0, model.page_size, 32):
        for h in range(model.kv_heads):
            values = block_address(model, layer, page, offset, h) + block_bytes(model)
            for i in range(0, block_bytes(model), 64):
                simd.store(values + i, zero)
