"""The first catalog: models, stores, datasets, machines, runs, batches, profiles, predictors, bench records."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    when = sa.DateTime(timezone=True)
    op.create_table(
        "models",
        sa.Column("digest", sa.String(16), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("architecture", sa.Text, nullable=False),
        sa.Column("layers", sa.Integer, nullable=False),
        sa.Column("experts", sa.Integer, nullable=False),
        sa.Column("top_k", sa.Integer, nullable=False),
        sa.Column("hidden_size", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.JSON, nullable=False),
        sa.Column("created", when, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_models"),
    )
    op.create_table(
        "stores",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("store_id", sa.String(32), nullable=False),
        sa.Column("location", sa.String(1024), nullable=False),
        sa.Column("model_digest", sa.String(16), nullable=False),
        sa.Column("capacity", sa.Integer, nullable=False),
        sa.Column("created", when, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stores"),
        sa.UniqueConstraint("store_id", "location", name="uq_stores_store_id"),
        sa.ForeignKeyConstraint(["model_digest"], ["models.digest"], name="fk_stores_model_digest"),
    )
    op.create_table(
        "datasets",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("identity", sa.String(512), nullable=False),
        sa.Column("created", when, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_datasets"),
        sa.UniqueConstraint("identity", name="uq_datasets_identity"),
    )
    op.create_table(
        "machines",
        sa.Column("digest", sa.String(16), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("description", sa.JSON, nullable=False),
        sa.Column("created", when, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_machines"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("store_pk", sa.Integer),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("model_digest", sa.String(16), nullable=False),
        sa.Column("dataset_pk", sa.Integer),
        sa.Column("machine_digest", sa.String(16)),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("versions", sa.JSON, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("kept", sa.BigInteger, nullable=False),
        sa.Column("replaced", sa.BigInteger, nullable=False),
        sa.Column("started", when, nullable=False),
        sa.Column("updated", when, nullable=False),
        sa.Column("finished", when),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("store_pk", "run_id", name="uq_runs_store_pk"),
        sa.ForeignKeyConstraint(["store_pk"], ["stores.id"], name="fk_runs_store_pk"),
        sa.ForeignKeyConstraint(["model_digest"], ["models.digest"], name="fk_runs_model_digest"),
        sa.ForeignKeyConstraint(["dataset_pk"], ["datasets.id"], name="fk_runs_dataset_pk"),
        sa.ForeignKeyConstraint(["machine_digest"], ["machines.digest"], name="fk_runs_machine_digest"),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("store_pk", sa.Integer, nullable=False),
        sa.Column("batch_id", sa.String(32), nullable=False),
        sa.Column("run_pk", sa.Integer, nullable=False),
        sa.Column("rows", sa.Integer, nullable=False),
        sa.Column("adopted", sa.Boolean, nullable=False),
        sa.Column("committed", when, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
        sa.UniqueConstraint("store_pk", "batch_id", name="uq_batches_store_pk"),
        sa.ForeignKeyConstraint(["store_pk"], ["stores.id"], name="fk_batches_store_pk"),
        sa.ForeignKeyConstraint(["run_pk"], ["runs.id"], name="fk_batches_run_pk"),
    )
    op.create_index("ix_batches_run_pk", "batches", ["run_pk"])
    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("model_digest", sa.String(16), nullable=False),
        sa.Column("machine_digest", sa.String(16), nullable=False),
        sa.Column("store_pk", sa.Integer),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("measures", sa.JSON, nullable=False),
        sa.Column("created", when, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profiles"),
        sa.ForeignKeyConstraint(["model_digest"], ["models.digest"], name="fk_profiles_model_digest"),
        sa.ForeignKeyConstraint(["machine_digest"], ["machines.digest"], name="fk_profiles_machine_digest"),
        sa.ForeignKeyConstraint(["store_pk"], ["stores.id"], name="fk_profiles_store_pk"),
    )
    op.create_index("ix_profiles_model_digest", "profiles", ["model_digest"])
    op.create_index("ix_profiles_machine_digest", "profiles", ["machine_digest"])
    op.create_table(
        "predictors",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("model_digest", sa.String(16), nullable=False),
        sa.Column("store_pk", sa.Integer),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("parameters", sa.LargeBinary, nullable=False),
        sa.Column("created", when, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_predictors"),
        sa.UniqueConstraint("model_digest", "store_pk", "name", name="uq_predictors_model_digest"),
        sa.ForeignKeyConstraint(["model_digest"], ["models.digest"], name="fk_predictors_model_digest"),
        sa.ForeignKeyConstraint(["store_pk"], ["stores.id"], name="fk_predictors_store_pk"),
    )
    op.create_table(
        "bench_records",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_pk", sa.Integer, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("executor", sa.String(16), nullable=False),
        sa.Column("store_state", sa.String(16), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger, nullable=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("measures", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_bench_records"),
        sa.UniqueConstraint("run_pk", "position", name="uq_bench_records_run_pk"),
        sa.ForeignKeyConstraint(["run_pk"], ["runs.id"], name="fk_bench_records_run_pk"),
    )
