"""Training drafters on what their target says: texts, recipes, the loop, and measuring.

    prompts -> texts (with the target's states) -> windows -> train -> a drafter's folder -> tau

`running` does all of it for `specjax train`. A new kind of drafter is a recipe (`recipe.Recipe`)
and a planner beside the others in `recipes`.
"""

from __future__ import annotations

from specjax.train.confidence import calibrate, confidences, write_temperatures
from specjax.train.evaluation import Group, Report, evaluate_prompts, read_groups
from specjax.train.recipe import Recipe
from specjax.train.running import Job, Stage, train_drafter
from specjax.train.texts import Writing, read_texts, write_texts
from specjax.train.training import Training, train

__all__ = [
    "Group",
    "Job",
    "Recipe",
    "Report",
    "Stage",
    "Training",
    "Writing",
    "calibrate",
    "confidences",
    "evaluate_prompts",
    "read_groups",
    "read_texts",
    "train",
    "train_drafter",
    "write_temperatures",
    "write_texts",
]
