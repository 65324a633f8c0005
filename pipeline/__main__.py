"""`python -m pipeline`: the same command, also if `pipeline` is not on the PATH."""

from pipeline.cli import main

if __name__ == "__main__":
    main.main(prog_name="pipeline")
