"""Train MTP heads on a frozen target, or (`task=target`) the small target itself.

python train.py                             heads for the shipped lab target
python train.py task=target model=lab_tiny  the lab target from text
python train.py task=cache data=cached      the target's hidden states, for heads to train from
python train.py --help                      groups, keys, legal values and meanings
"""

import sys

from mtp_research.__main__ import train

# run_entry is the @hydra.main of this file: Hydra's completion for bash looks for that word here.
if __name__ == "__main__":
    sys.exit(train())
