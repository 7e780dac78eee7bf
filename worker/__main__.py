"""`python -m worker --model DIR ...`: serve a model as a Dynamo worker."""

import sys

from worker.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
