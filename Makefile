# Targets for developers. Run the README's test command first, which sets up .venv.
.PHONY: test test-all lint types format site

test:
	.venv/bin/pytest -n 2 --dist loadfile

test-all:
	.venv/bin/pytest --all -n 2 --dist loadfile

lint:
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

site:
	.venv/bin/mkdocs build --strict

types:
	.venv/bin/mypy && .venv/bin/mypy --config-file benchmarks/mypy.ini

format:
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .
