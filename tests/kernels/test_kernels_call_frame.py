"""The layout of XLA's call frames, against the header that jaxlib ships."""

from __future__ import annotations

import re

from speculative.kernels import call_frame


def layout(name: str) -> dict[str, int]:
    """Byte offset of every field of a structure in jaxlib's header, on a 64-bit machine."""
    return _offsets(name)[0]


def _offsets(name: str) -> tuple[dict[str, int], int]:
    text = re.sub(r"//[^\n]*", "", call_frame.header())
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", text, re.DOTALL)
    assert body is not None, f"no structure {name}"
    offsets, at, widest = {}, 0, 1
    for field in filter(None, (f.strip() for f in body.group(1).split(";"))):
        macro = re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", field)
        kind, label = ("*", macro.group(1)) if macro else field.rsplit(maxsplit=1)
        if label.startswith("*") or kind.endswith("*") or kind in ("size_t", "int64_t"):
            size = align = 8
        elif kind in ("int", "int32_t", "uint32_t") or kind in ENUMS:
            size = align = 4
        else:
            size, align = _offsets(kind)[1], 8
        at = -(-at // align) * align
        offsets[label.lstrip("*")] = at
        at, widest = at + size, max(widest, align)
    return offsets, -(-at // widest) * widest


ENUMS = (
    "XLA_FFI_DataType",
    "XLA_FFI_ExecutionStage",
    "XLA_FFI_Extension_Type",
    "XLA_FFI_InternalExtension_Type",  # its name in jaxlib 0.12
    "XLA_FFI_Handler_Traits",
)


def test_structures_are_laid_out_as_in_the_header():
    """Where jaxlib moved a field, a call would read, or jump, somewhere else."""
    frame, api = layout("XLA_FFI_CallFrame"), layout("XLA_FFI_Api")
    assert frame["extension_start"] == call_frame._FRAME_EXTENSION
    assert frame["api"] == call_frame._FRAME_API
    assert frame["ctx"] == call_frame._FRAME_CONTEXT
    assert frame["args"] + layout("XLA_FFI_Args")["args"] == call_frame._FRAME_ARGUMENTS
    assert frame["rets"] + layout("XLA_FFI_Rets")["rets"] == call_frame._FRAME_RESULTS
    buffer = layout("XLA_FFI_Buffer")
    assert buffer["data"] == call_frame._BUFFER_DATA
    assert buffer["dims"] == call_frame._BUFFER_DIMENSIONS
    assert layout("XLA_FFI_Metadata_Extension")["metadata"] == call_frame._EXTENSION_METADATA
    base = re.search(r"struct (XLA_FFI_\w*Extension\w*) \{", call_frame.header()).group(1)
    assert layout(base)["type"] == call_frame._EXTENSION_TYPE
    assert f"XLA_FFI_Extension_Metadata = {call_frame._METADATA}," in call_frame.header()
    version = layout("XLA_FFI_Metadata")["api_version"]
    fields = layout("XLA_FFI_Api_Version")
    assert version + fields["major_version"] == call_frame._METADATA_MAJOR
    assert version + fields["minor_version"] == call_frame._METADATA_MINOR
    for name in ("ThreadPool_Schedule", "ThreadPool_NumThreads", "Error_Destroy"):
        name = f"XLA_FFI_{name}"
        assert api[name] == call_frame._function_offset(name)
        # The arguments are a record of pointers behind a size and an extension.
        arguments = list(layout(f"{name}_Args").values())
        assert arguments == list(range(0, 8 * len(arguments), 8))
