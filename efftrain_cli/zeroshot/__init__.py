"""Zero-shot evaluation: what a trained GPT can do on tasks it was never trained for.

`score` turns (context, continuation) token pairs into log-probabilities; `language_model` hands it
to EleutherAI's lm-evaluation-harness; `suites` names the tasks and fixes one metric for each;
`local_data` and `harness` give the tasks their items; `own_tasks` are the protocols that the
harness lacks; `results` is what is written into the run directory.
"""
