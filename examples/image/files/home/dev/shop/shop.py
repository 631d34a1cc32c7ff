"""A shop: orders in SQLite, served over HTTP. `migrate` brings the database to the newest schema, one step at a time."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MIGRATIONS = Path(__file__).parent / "migrations"


def open_database() -> sqlite3.Connection:
    return sqlite3.connect(os.environ.get("SHOP_DATABASE", "shop.db"))


def migrate() -> None:
    with open_database() as database:
        (version,) = database.execute("pragma user_version").fetchone()
        for number, path in enumerate(sorted(MIGRATIONS.glob("*.sql")), 1):
            if number > version:
                database.executescript(path.read_text() + f";pragma user_version = {number}")
                print(f"applied {path.name}")


def fill(num: int) -> None:
    with open_database() as database:
        rows = [(f"customer {i % 7}", 100 + 37 * i % 900) for i in range(num)]
        database.executemany("insert into orders (customer, cents) values (?, ?)", rows)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        with open_database() as database:
            if self.path == "/orders":
                found = database.execute("select customer, sum(cents) from orders group by customer order by customer").fetchall()
            else:
                found = database.execute("select count(*) from orders").fetchone()
        body = json.dumps(found).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(verb: str, *words: str) -> None:
    if verb == "migrate":
        migrate()
    elif verb == "fill":
        fill(int(words[0]))
    elif verb == "serve":
        ThreadingHTTPServer(("127.0.0.1", int(words[0])), Handler).serve_forever()
    elif verb == "ask":
        with urllib.request.urlopen(f"http://127.0.0.1:{words[0]}{words[1]}", timeout=5) as answer:
            print(answer.read().decode(), end="")
    else:
        raise SystemExit("shop.py migrate | fill NUM | serve PORT | ask PORT PATH")


if __name__ == "__main__":
    main(*sys.argv[1:])
