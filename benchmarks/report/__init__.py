"""How results are shown: one renderer makes pages, the report and the tables of READMEs."""
