"""Results of the library as tables of pandas, which Duet does not depend on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from duetgan.utils.errors import explained

if TYPE_CHECKING:
    import pandas


def data_frame(columns: Mapping[str, Sequence[object]]) -> "pandas.DataFrame":
    """Return columns of equal length as a table. Raises UserError if pandas is not installed."""
    with explained(ImportError, "to_pandas needs pandas; `pip install pandas`"):
        import pandas
    return pandas.DataFrame(dict(columns))
