"""The footer of a Parquet file, read without pyarrow."""

import io
import struct

import pytest
from data_files import cifar_tables, feature_table, features, images

from fissile import FileError
from fissile.data.tables import _value, claims

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("groups", [1, 3, 34])
@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_it_says_what_pyarrow_says(groups, version, tmp_path):
    path = feature_table(tmp_path / "f.parquet", features(), metadata={"encoder": "mine" * 50})
    table = parquet.read_table(path)
    parquet.write_table(table, path, row_group_size=-(-34 // groups), version=version)
    about = parquet.read_metadata(path)
    size, rows, values = claims(path, "features")
    assert size == path.stat().st_size
    assert rows == about.num_rows == 34
    columns = [about.row_group(k).column(0) for k in range(about.num_row_groups)]
    assert values == sum(column.num_values for column in columns) == 34 * 5
    assert claims(path, "label")[2] == 34
    assert claims(path, "")[2] == 0


def test_columns_of_other_types(tmp_path):
    cifar_tables(tmp_path, images(3, 2))
    assert claims(tmp_path / "train-00000-of-00001.parquet", "img")[2] == 6  # bytes and path
    columns = {"a": [{"k": 1.5}], "b": [True], "c": [1.5], "d": ["x"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert claims(tmp_path / "t.parquet", "b")[2] == 1


def footer(content):
    return b"PAR1" + content + struct.pack("<I", len(content)) + b"PAR1"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PAR1", b"PAR1" * 2, footer(b"")[:-4] + b"PARE", footer(b"\x19\xfc\xff\xff\xff\x7f"),
        footer(b"\x1c" * 2000), footer(b"\x18\xff\xff\xff\xff\xff\x7f"), footer(b"\x1e\0"),
        b"PAR1" + struct.pack("<I", 2**31) + b"PAR1", footer(b"\x36\x01\x19\x0c\0"),
    ],
)  # fmt: skip
def test_what_is_no_footer_is_an_error(data, tmp_path):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises((FileError, LookupError, ValueError, RecursionError, struct.error)):
        claims(tmp_path / "f", "features")


def test_a_count_below_zero_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(footer(b"\x36\x01\x19\x0c\0"))
    with pytest.raises(FileError, match="no count"):
        claims(tmp_path / "f", "features")


def test_every_type_of_the_protocol():
    fields = (
        b"\x11" b"\x12" b"\x13\x07" b"\x14\x09" b"\x15\x0a" b"\x16\xac\x02" b"\x17" + b"x" * 8
        + b"\x18\x02hi" + b"\x19\x23\x01\x02" + b"\x1c\x11\0" + b"\x05\x28\x08" + b"\0"
    )  # fmt: skip
    found = _value(io.BytesIO(fields), 12)
    assert list(found.values()) == [1, 2, 7, -5, 5, 150, b"x" * 8, b"hi", [1, 2], {1: 1}, 4]
    assert list(found) == [*range(1, 11), 20]
