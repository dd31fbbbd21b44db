"""Tables from files: reading, columns as numbers, a fitted model in a folder, its predictions and its report."""
