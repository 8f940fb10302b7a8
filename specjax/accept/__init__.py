"""Accept: which drafted tokens stand, and what follows them, so that the law is the target's.

With p the target's law, q the draft's and x ~ q: keep x with probability min(1, p(x) / q(x));
otherwise draw from norm(max(p - q, 0)). The token that results is distributed as p, whatever q.
The other rules vary this one: more drafts at once, or a law that is knowingly another.

Reference: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1; Chen et al. 2023
(arXiv:2302.01318), Algorithm 2.
"""

from specjax.accept.chain import chain_following, chain_keep, speculative_sampling
from specjax.accept.laws import TargetLaw, dense_law, logits_law
from specjax.accept.rule import Acceptance, JudgeFn, keep_probability, residual
from specjax.accept.step import accept_and_resample

__all__ = [
    "Acceptance",
    "JudgeFn",
    "TargetLaw",
    "accept_and_resample",
    "chain_following",
    "chain_keep",
    "dense_law",
    "keep_probability",
    "logits_law",
    "residual",
    "speculative_sampling",
]
