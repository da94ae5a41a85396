"""Alembic's entry: runs the migrations on the connection that the program hands over."""

from alembic import context

from store.entities import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
