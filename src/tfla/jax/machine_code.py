"""The machine code of a kernel in the message by which jaxlib is told of its call.

jaxlib's Python interface takes the PTX of a kernel, which its plugin assembles kernel by kernel while XLA compiles. The
message (`jaxlib/gpu/triton.proto`) has a field for an assembled kernel besides, which is then loaded as it is.
"""

from __future__ import annotations

KERNEL_CALL, KERNEL, MODULE_IMAGE = 1, 1, 11  # fields of TritonAnyKernelCall, TritonKernelCall and TritonKernel
OBJECT_FILE, KERNEL_NAME, SHARED_MEM_BYTES = 1, 2, 3  # fields of ModuleImageProto
NUMBER, BYTES = 0, 2  # types on the wire


def with_machine_code(call: bytes, name: str, shared: int, cubin: bytes) -> bytes:
    """Return the message of a call, with the assembled kernel beside its PTX.

    The second half is a message of the same type that has this field alone: a reader merges messages that follow each
    other.

    Args:
        call: the message, a serialized TritonAnyKernelCall.
        name: the name of the kernel.
        shared: its bytes of shared memory.
        cubin: its machine code.
    """
    image = _bytes(OBJECT_FILE, cubin) + _bytes(KERNEL_NAME, name.encode())
    image += _number(SHARED_MEM_BYTES << 3 | NUMBER) + _number(shared)
    return call + _bytes(KERNEL_CALL, _bytes(KERNEL, _bytes(MODULE_IMAGE, image)))


def _number(n: int) -> bytes:
    """Return a number in base 128, the lowest digit first; all bytes but the last have their highest bit set."""
    digits = []
    while n > 127:
        digits.append(n & 127 | 128)
        n >>= 7
    return bytes([*digits, n])


def _bytes(field: int, value: bytes) -> bytes:
    """Return a field of bytes, or of a message."""
    return _number(field << 3 | BYTES) + _number(len(value)) + value
