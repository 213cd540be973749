"""The README's Python runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


PRINTED = ("(2, 8, 100, 64)", "bwd_convert_dq")


@pytest.mark.parametrize(("block", "printed"), list(zip(BLOCKS, PRINTED, strict=True)), ids=PRINTED)
def test_python_blocks_run(block: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
