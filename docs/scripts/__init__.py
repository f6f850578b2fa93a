"""Scripts of the pages: tables, figures, the notebook, and hooks of the site."""
