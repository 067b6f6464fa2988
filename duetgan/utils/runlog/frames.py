"""Convert results to tables of pandas, which is an optional package."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from duetgan.utils.errors import explained

if TYPE_CHECKING:
    import pandas


def data_frame(columns: Mapping[str, Sequence[object]]) -> "pandas.DataFrame":
    """Return a table from a mapping of column names to values, all columns of equal length.

    Raises UserError if pandas is not installed.
    """
    with explained(ImportError, "to_pandas needs pandas; `pip install pandas`"):
        import pandas
    return pandas.DataFrame(dict(columns))
