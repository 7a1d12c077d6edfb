"""The form of results files, a module for each: what a program that reads them may rely on."""
