"""Where ctxguard meets training frameworks and agent libraries: one module for each optional package."""
