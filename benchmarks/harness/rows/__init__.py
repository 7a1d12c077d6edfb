"""The form of results files, a module for each benchmark: what a program that reads them may rely on."""
