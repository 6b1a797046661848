"""`python -m train_ledger.launch RUN.json OUT_DIR`: one rank, started by torchrun."""

import sys

from train_ledger.launch.worlds.nccl import main

if __name__ == "__main__":
    sys.exit(main())
