"""Beginning a project and driving it to the end of its plan in this process, with its progress on the terminal."""
