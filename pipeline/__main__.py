"""`python -m pipeline`, where the command is not on the PATH."""

from pipeline.cli import main

if __name__ == "__main__":
    main.main(prog_name="pipeline")
