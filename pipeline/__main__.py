"""`python -m pipeline`: the same command, also if `pipeline` is not on the PATH."""

import atexit
import gc

from pipeline.cli import main

if __name__ == "__main__":
    # Otherwise Python looks for cyclic garbage at exit: 2 s after an export of torch.
    atexit.register(gc.freeze)
    main.main(prog_name="pipeline")
