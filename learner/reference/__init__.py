"""The demo's model and data: one user of `learner.program`, no part of the learner itself."""
