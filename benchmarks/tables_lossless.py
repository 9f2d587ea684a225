"""Tables of lossless decoding in vLLM, from what ``benchmarks/lossless.py`` measured."""

from __future__ import annotations

from common import Row, load, table

SHAPES = {"qwen3-1.7b": "1.7B", "qwen3-8b": "8B"}


def lossless_speed() -> str:
    rows = []
    for shape, label in SHAPES.items():
        stock = {(row["batch"], row["length"]): row for row in load(f"lossless_{shape}_stock")["points"]}
        found: dict[tuple[int, int], dict[tuple[float, int | str], Row]] = {}
        for row in load(f"lossless_{shape}")["points"]:
            found.setdefault((row["batch"], row["length"]), {})[row["rate"], row["drafts"]] = row
        for (batch, length), at in found.items():
            base = stock[batch, length]["tokens_per_s"]

            def gain(rate: float, drafts: int | str, at: dict = at, base: float = base) -> str:
                return f"{at[rate, drafts]['tokens_per_s'] / base:.2f}x" if (rate, drafts) in at else ""

            gains = [*(gain(0.95, k) for k in (0, 4, 8, 12, "adapt")), gain(0.943, "adapt"), gain(0.9, "adapt")]
            rows.append([label, f"{batch} x {length:,}", f"{base:,.0f}", *gains])
    head = ["shape", "sequences x tokens", "stock tokens/s", "0 drafts", "4", "8", "12", "chosen", "chosen, 0.943"]
    return table([*head, "chosen, 0.90"], rows)


def lossless_memory() -> str:
    rows = []
    for shape, label in SHAPES.items():
        stock, ours = load(f"lossless_{shape}_stock"), load(f"lossless_{shape}")
        tokens = [found["kv_tokens"] for found in (stock, ours)]
        starts = [f"{found['start_s']:.0f} s" for found in (stock, ours)]
        rows.append([label, *(f"{n:,}" for n in tokens), f"{tokens[1] / tokens[0] - 1:+.1%}", *starts])
    return table(["shape", "KV cache, stock (tokens)", "lossless", "", "start, stock", "lossless"], rows)


TABLES = {"lossless speed": lossless_speed, "lossless memory": lossless_memory}
