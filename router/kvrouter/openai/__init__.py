"""OpenAI's API: requests as routing reads them, answers as clients see them."""
