"""`python -m worker --model DIR ...`: serve a model as a Dynamo worker."""

import sys

from worker.serve import run

if __name__ == "__main__":
    run(sys.argv[1:])
