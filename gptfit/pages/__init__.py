"""Pages a person opens in a browser: report, live page, tune page and what they share."""
