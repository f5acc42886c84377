"""Its place puts tests/ on the import path of every test: see fake_openai_server."""
