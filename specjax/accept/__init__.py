"""Accept: which drafted tokens stand, and what follows them, so that the law is the target's.

With p the target's law, q the draft's and x ~ q: keep x with probability min(1, p(x) / q(x));
otherwise draw from norm(max(p - q, 0)). The token that results is distributed as p, whatever q.
The other rules vary this one: more drafts at once, or a law that is knowingly another.

Reference: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1; Chen et al. 2023
(arXiv:2302.01318), Algorithm 2.
"""

from specjax.accept.block import block_following, block_keep, block_verification, block_weights
from specjax.accept.chain import (
    chain_following,
    chain_keep,
    lenient_sampling,
    speculative_sampling,
)
from specjax.accept.laws import TargetLaw, dense_law, logits_law
from specjax.accept.names import RULES
from specjax.accept.rule import Acceptance, JudgeFn, keep_probability, residual
from specjax.accept.step import accept_and_resample
from specjax.accept.synthetic import synthetic_acceptance
from specjax.accept.traversal import traversal_verification, walk_up
from specjax.accept.tree import (
    Topology,
    Walk,
    k_sequential,
    one_by_one,
    recursive_rejection,
    spectr,
    topology,
    walk_down,
)
from specjax.accept.typical import typical_acceptance, typical_best, typical_keep

__all__ = [
    "RULES",
    "Acceptance",
    "JudgeFn",
    "TargetLaw",
    "Topology",
    "Walk",
    "accept_and_resample",
    "block_following",
    "block_keep",
    "block_verification",
    "block_weights",
    "chain_following",
    "chain_keep",
    "dense_law",
    "k_sequential",
    "keep_probability",
    "lenient_sampling",
    "logits_law",
    "one_by_one",
    "recursive_rejection",
    "residual",
    "spectr",
    "speculative_sampling",
    "synthetic_acceptance",
    "topology",
    "traversal_verification",
    "typical_acceptance",
    "typical_best",
    "typical_keep",
    "walk_down",
    "walk_up",
]
