"""Evaluation of runs and models: every kind of task takes the same way from a command to a table and a page.

    laconic evaluate, audit: EvalRequest                                laconic report, model cards
        suites.choose_suite                                                 |
        suite.evaluate_runs: seeds, locks, ranks, signals                   |
            EvalSuite.check, build_jobs -> EvalJob                          |
        results_store.run_resumable: EvalRecords in RUN/evaluations ----> suite.load_results
        RunResult: the items of all seeds of a run on a task <--------------/
        EvalSuite.report -> EvalReport: tables, lines, JSON             EvalSuite.build_sections -> suites.build_report

A family of tasks gives the jobs, the scores of its items, columns and texts:

    reasoning/          question_sets, run (jobs), evaluate; table; suite
    inspection/         conditions (jobs of an audit), verdict, audit_suite; question, dataset, page of laconic inspect,
                        which stores nothing
    compression/        run (jobs), tails, evaluate, scores, report; files: context_qa, demonstrations; suite
    memories/           documents, contexts, report; suite (jobs)
    streams/            tasks (jobs), texts, evaluate, metrics, report; suite
    class_incremental/  run (jobs), protocol, report; a part of the suite of streams
    text_loss.py        the task `loss` as a whole, the shortest example

Beside these: `validation.py` during training, `lm_eval_model.py` for lm-evaluation-harness, `model_card.py`.
"""
