# Short names for the tasks of a developer; `just --list` shows them.

# Install everything that the tasks need
install:
    pip install -e ".[test,dev,docs]"

# Lint, format and types
lint:
    ruff check .
    ruff format --check .
    pyright

# All quick tests, or those of a folder or file
test *WHERE:
    python -m pytest {{WHERE}}

# The website, rebuilt at each change
docs:
    mkdocs serve -f docs/mkdocs.yml

# Fresh goldens of transformers 4.41.1 in DIR, made by the Python of an environment with tests/goldens/requirements-441.txt
goldens DIR ORACLE SEED="0":
    {{ORACLE}} tests/goldens/make_441.py --seed {{SEED}} --out {{DIR}}/441

# Regenerated pages
pages:
    python -m jaxgen.core.config.reference > docs/options.md

# The benchmarks
bench *ARGS:
    python -m benchmarks {{ARGS}}
