"""Decode the prompts with each hidden-state policy and with K = 0; compare speed and acceptance.

python eval.py spec.k=3              both policies on the shipped prompts
python eval.py spec.head=RUN/head    heads that train.py wrote to the folder RUN
python eval.py -m spec.k=1,3         two runs, each in its folder; spec.k=[1,3] is one paired run
python eval.py --help                groups, keys, legal values and meanings
"""

import sys

from mtp_research.__main__ import evaluate

# run_entry is the @hydra.main of this file: Hydra's completion for bash looks for that word here.
if __name__ == "__main__":
    sys.exit(evaluate())
