import sys

import pytest

from duetgan.utils.errors import UserError
from duetgan.utils.runlog.frames import data_frame


def test_columns_become_a_table_of_pandas_or_the_error_says_how(monkeypatch):
    pytest.importorskip("pandas")
    table = data_frame({"label": ["a", "b"], "seed": [3, 4]})
    assert table.to_dict("list") == {"label": ["a", "b"], "seed": [3, 4]}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        data_frame({})
