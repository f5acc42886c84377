"""Compiles a Triton kernel for a GPU that is not there. Runs in the stack's interpreter."""

# The lint environment has neither torch nor Triton.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_one(
    function: Any, capability: int, types: dict[str, str], constants: dict[str, Any], **options: int
) -> dict[str, Any]:
    """Shared memory in bytes, registers of a thread, bytes of them that do not fit, and the products' instructions.

    Arguments are 32-bit integers where `types` does not say. They and the pointers are multiples of 16, as they are
    when vLLM runs, but for those that the kernel does not specialize.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for place, parameter in enumerate(function.params):
        name = parameter.name
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        fixed = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if signature[name] not in ("constexpr", "fp32") and not fixed:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    products = re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*", made.asm["ptx"])
    return {
        "shared": made.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "products": sorted(set(products)),
    }
