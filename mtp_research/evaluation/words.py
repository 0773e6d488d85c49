"""What a page's letters and names mean, for a reader who has the page alone.

Sections (`sections.py`, `study_sections.py`) put these among their notes, of which a page shows
each once. The full story is in docs/concepts.md.
"""

from mtp_research.evaluation.stats.statistics import FORMULAS

LETTERS = (
    "Letters: K = drafts per step, N = MTP modules of the heads, R = batch = requests decoded at a "
    "time, T = sampling temperature, n = number of prompts, r = rejected drafts of a round; a "
    "round is one verification of a request's drafts."
)
RATES = (
    f"acceptance rate, rate = {FORMULAS['acceptance_rate']}; baseline, K = 0 = plain decoding of "
    "the same run; ratio, to baseline = tokens/s over those of the baseline."
)
HEAD_WORDS = (
    "Heads are named by what depth m of their training read: chain = the output of depth m-1 at "
    "the same row; ttt (one module) and shared_context (N modules) = the target's history, then "
    "draft rows; mixed = as chain, or the output of an earlier depth; independent = the target's "
    "hidden vector with the token shifted. pre_norm, post_norm = whether the hidden vector that "
    "one module hands to the next is taken before or after the final norm."
)
POLICY_WORDS = (
    "Decode policies, by the rows of the draft passes: eagle = the target's hidden vectors in "
    "every module's history, draft rows above it; training = each pass reads the output of the "
    "pass before at the same row, and the last K + 1 rows run again; eagle_norefresh = as eagle, "
    "but only the first pass runs the newly verified rows; training_norefresh = as training, but "
    "newly verified rows alone; window = the target's hidden vector of the row just before the "
    "token, or a drafted one beyond the verified text, last K rows; target_roll = the target's "
    "hidden vector at the row itself, newly verified rows alone; target_roll_rerun = the same with "
    "the last K + 1 rows run again."
)
FAULT_WORDS = (
    "Slots of the draft KV, against a recompute over the text alone: WRONG = the row consumed a "
    "token that is not in the text; MIXED = right token, but a draft-made hidden vector although "
    "the target's own is known; HOLE = never written; PROVISIONAL = depends on tokens that are not "
    "decided yet, no fault."
)
