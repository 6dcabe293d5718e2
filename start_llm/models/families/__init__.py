"""What is known of families of models: one TOML file each. Adding a family is adding a file.

A family is where finding out begins, and what counts where nothing else says. Keys of a file:

- ``title``: for people.
- ``names``: parts of a model's name; ``types``: beginnings of ``model_type`` in ``config.json``; both in lower case.
- ``tokens``: the vocabulary has one of them.
- ``tool_parsers``: ids of `parsing.registry`, in the order in which they are tried; the first is assumed.
  A test looks whether they are known.
- ``reasoning_parser``: id of the reasoning style, where neither vocabulary nor template shows one.
- ``efforts``: values of ``reasoning_effort`` that the model was trained with.

No file holds sampling defaults: those are in the checkpoint's ``generation_config.json`` (`models/generation_config`).
"""
