"""Print the table of hooks, situations and backends for docs/loops.md."""

from tests.conformance.table import table

if __name__ == "__main__":
    print(table())
