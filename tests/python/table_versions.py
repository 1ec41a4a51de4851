# SPDX-License-Identifier: Apache-2.0
"""Make a table with a library, change it, and print its versions as JSON: twice before the change,
and after it. Usage: table_versions.py LIBRARY FOLDER"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from penstock.loader.data_version import data_version


class Reader(Dataset[Any]):
    """A user's dataset that reads a table."""

    def __init__(self, table: Any) -> None:
        self.table = table


def lance_table(folder: Path) -> tuple[Any, Callable[[], Any]]:
    lance = importlib.import_module("lance")
    pyarrow = importlib.import_module("pyarrow")
    path = str(folder / "rows.lance")
    first = lance.write_dataset(pyarrow.table({"row": [1, 2]}), path)
    return first, lambda: lance.write_dataset(pyarrow.table({"row": [3]}), path, mode="append")


def lancedb_table(folder: Path) -> tuple[Any, Callable[[], Any]]:
    lancedb = importlib.import_module("lancedb")
    pyarrow = importlib.import_module("pyarrow")
    database = lancedb.connect(str(folder))
    first = database.create_table("rows", pyarrow.table({"row": [1, 2]}))

    def change() -> Any:
        table = database.open_table("rows")
        table.add(pyarrow.table({"row": [3]}))
        return table

    return first, change


def deep_lake_table(folder: Path) -> tuple[Any, Callable[[], Any]]:
    deeplake = importlib.import_module("deeplake")
    address = f"file://{folder}/rows"
    first = deeplake.create(address)
    first.add_column("row", deeplake.types.Int32())
    first.append({"row": [1, 2]})
    first.commit("first")

    def change() -> Any:
        later = deeplake.open(address)
        later.append({"row": [3]})
        later.commit("second")
        return later

    return deeplake.open_read_only(address), change


def iceberg_table(folder: Path) -> tuple[Any, Callable[[], Any]]:
    catalogs = importlib.import_module("pyiceberg.catalog.sql")
    pyarrow = importlib.import_module("pyarrow")
    catalog = catalogs.SqlCatalog(
        "own", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}"
    )
    catalog.create_namespace("space")
    table = catalog.create_table("space.rows", schema=pyarrow.schema([("row", pyarrow.int64())]))
    table.append(pyarrow.table({"row": [1, 2]}))

    def change() -> Any:
        later = catalog.load_table("space.rows")
        later.append(pyarrow.table({"row": [3]}))
        return later

    return catalog.load_table("space.rows"), change


def hugging_face_table(folder: Path) -> tuple[Any, Callable[[], Any]]:
    datasets = importlib.import_module("datasets")
    table = datasets.Dataset.from_dict({"row": [1, 2]})
    return table, lambda: table.select([1])


MAKERS = {
    "lance": lance_table,
    "lancedb": lancedb_table,
    "deeplake": deep_lake_table,
    "pyiceberg": iceberg_table,
    "datasets": hugging_face_table,
}

if __name__ == "__main__":
    table, change = MAKERS[sys.argv[1]](Path(sys.argv[2]))
    versions = [data_version(Reader(table)), data_version(Reader(table))]
    print(json.dumps([*versions, data_version(Reader(change()))]))
