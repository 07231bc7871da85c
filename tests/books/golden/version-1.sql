BEGIN TRANSACTION;
CREATE TABLE books_version (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "books_version" VALUES(1);
CREATE TABLE decision_log (
	number INTEGER NOT NULL, 
	decision_id VARCHAR NOT NULL, 
	at_us BIGINT NOT NULL, 
	"by" VARCHAR NOT NULL, 
	from_state VARCHAR, 
	to_state VARCHAR NOT NULL, 
	reason VARCHAR, 
	PRIMARY KEY (number)
);
INSERT INTO "decision_log" VALUES(1,'d1',1800000000000000,'recommender',NULL,'proposed','limit far above peak');
INSERT INTO "decision_log" VALUES(2,'d2',1800000000000000,'recommender',NULL,'proposed','limit far above peak');
INSERT INTO "decision_log" VALUES(3,'d3',1800000000000000,'recommender',NULL,'proposed','größer, ''quoted''');
INSERT INTO "decision_log" VALUES(4,'d4',1800000000000000,'ann',NULL,'proposed','limit far above peak');
INSERT INTO "decision_log" VALUES(5,'d5',1800000000000000,'ann',NULL,'proposed','limit far above peak');
INSERT INTO "decision_log" VALUES(6,'d1',1800000060000000,'ann','proposed','approved','looks right');
INSERT INTO "decision_log" VALUES(7,'d3',1800000060000000,'bob','proposed','rejected',NULL);
INSERT INTO "decision_log" VALUES(8,'d5',1800000060000000,'ann','proposed','approved',NULL);
INSERT INTO "decision_log" VALUES(9,'d1',1800000090000000,'enforcer@n1','approved','applied','done');
INSERT INTO "decision_log" VALUES(10,'d2',1800000095000000,'enforcer@n1','proposed','proposed','refused by the enforcer although proposed: not approved');
INSERT INTO "decision_log" VALUES(11,'d2',1800007260000000,'collector','proposed','expired','not approved in time');
INSERT INTO "decision_log" VALUES(12,'d4',1800007260000000,'collector','proposed','expired','not approved in time');
INSERT INTO "decision_log" VALUES(13,'d5',1800007260000000,'collector','approved','expired','no answer of the enforcer');
CREATE TABLE decisions (
	id VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	allocation_id VARCHAR NOT NULL, 
	device_uuid VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	sequence BIGINT NOT NULL, 
	created_us BIGINT NOT NULL, 
	expires_us BIGINT NOT NULL, 
	rule VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	input_hash VARCHAR NOT NULL, 
	memory_bytes BIGINT, 
	compute_ppm BIGINT, 
	memory_before_bytes BIGINT, 
	compute_before_ppm BIGINT, 
	state VARCHAR NOT NULL, 
	signature VARCHAR, 
	state_reason VARCHAR, 
	decided_by VARCHAR, 
	decided_at_us BIGINT, 
	outcome VARCHAR, 
	outcome_reason VARCHAR, 
	outcome_at_us BIGINT, 
	PRIMARY KEY (id), 
	UNIQUE (node, sequence)
);
INSERT INTO "decisions" VALUES('d1','n1','a1','GPU-1',3,1,1800000000000000,1800003600000000,'memory-peak','limit far above peak','abababababababababababababababababababababababababababababababab',1073741824,NULL,8589934592,NULL,'applied',NULL,'done','ann',1800000060000000,'applied','done',1800000090000000);
INSERT INTO "decisions" VALUES('d2','n1','a1','GPU-1',3,2,1800000000000000,1800003600000000,'memory-peak','limit far above peak','abababababababababababababababababababababababababababababababab',1073741824,NULL,8589934592,NULL,'expired',NULL,'not approved in time',NULL,NULL,'refused','not approved',1800000095000000);
INSERT INTO "decisions" VALUES('d3','n2','a1','GPU-1',3,1,1800000000000000,1800003600000000,'memory-peak','größer, ''quoted''','abababababababababababababababababababababababababababababababab',NULL,250000,8589934592,NULL,'rejected','sig',NULL,'bob',1800000060000000,NULL,NULL,NULL);
INSERT INTO "decisions" VALUES('d4','n1','a1','GPU-1',3,3,1800000000000000,1800003600000000,'memory-peak','limit far above peak','abababababababababababababababababababababababababababababababab',1073741824,NULL,8589934592,NULL,'expired',NULL,'not approved in time',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "decisions" VALUES('d5','n1','a1','GPU-1',3,4,1800000000000000,1800003600000000,'memory-peak','limit far above peak','abababababababababababababababababababababababababababababababab',1073741824,NULL,8589934592,NULL,'expired',NULL,'no answer of the enforcer','ann',1800000060000000,NULL,NULL,NULL);
CREATE INDEX decisions_by_state ON decisions (state, node, sequence);
CREATE INDEX ix_decision_log_decision_id ON decision_log (decision_id);
COMMIT;
