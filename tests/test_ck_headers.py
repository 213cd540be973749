"""CK's headers of GEMM and of convolution: their revisions are recognised by files."""

from pathlib import Path
from typing import Any

import pytest

from catalog.build.hip.ck_headers import CkHeaders
from catalog.errors import BuildError
from catalog.ops import operation as operation_named
from catalog.ops.conv.kernels.ck.headers import HEADERS as OF_CONV
from catalog.ops.gemm.kernels.ck.headers import HEADERS as OF_GEMM
from catalog.settings import settings


@pytest.mark.parametrize(("operation", "headers"), [("gemm", OF_GEMM), ("conv", OF_CONV)])
@pytest.mark.parametrize("revision", ["2025-07", "2025-11"])
def test_headers_are_recognised_by_their_files(
    operation: str, headers: CkHeaders[Any], revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ck" / "include" / headers.folder
    files = [folder / name for name in headers.facts().headers[revision].has]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setenv("CATALOG_CK_ROOT", str(tmp_path / "ck"))
    settings.cache_clear()
    include = headers.find_include()
    assert include == tmp_path / "ck" / "include"
    assert headers.revision_of(include) == revision
    assert operation_named(operation).other_headers("hip") == {"ck": include}
    assert headers.revisions_here() == (revision,)
    for file in files:
        file.unlink()
    with pytest.raises(BuildError, match="none of the revisions 2025-07, 2025-11"):
        headers.revision_of(include)
    assert headers.revisions_here() == ()
    (tmp_path / "other" / "include" / headers.folder).mkdir(parents=True)
    monkeypatch.setenv("CATALOG_CK_ROOT", str(tmp_path))
    settings.cache_clear()
    with pytest.raises(BuildError, match="holds several folders"):
        headers.find_include()
    monkeypatch.undo()
    settings.cache_clear()
