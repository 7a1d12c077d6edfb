"""Language models of users: their texts, the dictionary, training for whole users, next-word metrics."""
