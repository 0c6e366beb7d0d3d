"""GGUF files written by hand, from the text of the format and independently of bigload."""

import struct

BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2), 39: (32, 17)}
"""Elements and bytes of a block, of the types that tests write."""


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(given):
    """Return the type number and value: text, a whole number, a float, a list of whole numbers or of texts."""
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    if isinstance(given, bool):
        return struct.pack("<I?", 7, given)
    if isinstance(given, int):
        return struct.pack("<II", 4, given)
    if isinstance(given, float):
        return struct.pack("<If", 6, given)
    if given and isinstance(given[0], str):
        return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(text, given))
    return struct.pack("<IIQ", 9, 4, len(given)) + struct.pack(f"<{len(given)}I", *given)


def gguf_bytes(tensors, metadata=None, *, keys=None, records=None, version=3, alignment=32):
    """Return a file with `tensors`, type and shape by name; `keys` and `records` replace what is written."""
    keys = [text(key) + value(given) for key, given in (metadata or {}).items()] if keys is None else keys
    offset, made = 0, []
    for name, (kind, shape) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        made.append(text(name) + dims + struct.pack("<IQ", kind, offset))
        elements, num_bytes = BLOCKS[kind]
        count = 1
        for size in shape:
            count *= size
        offset += -(-(count // elements * num_bytes) // alignment) * alignment
    records = made if records is None else records
    head = b"GGUF" + struct.pack("<IQQ", version, len(records), len(keys)) + b"".join(keys) + b"".join(records)
    return head + bytes(-len(head) % alignment) + bytes(offset)


def write_gguf(path, tensors, metadata=None, **options):
    path.write_bytes(gguf_bytes(tensors, metadata, **options))
    return path
