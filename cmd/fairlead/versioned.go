// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/fairlead/fairlead/internal/status"
)

// schemaVersioned marshals v, a JSON object, with a first field "schemaVersion".
type schemaVersioned struct{ v any }

func versioned(v any) schemaVersioned { return schemaVersioned{v} }

// MarshalJSON implements json.Marshaler.
func (s schemaVersioned) MarshalJSON() ([]byte, error) {
	b, err := json.Marshal(s.v)
	if err != nil {
		return nil, err
	}
	fields, ok := bytes.CutPrefix(b, []byte("{"))
	if !ok {
		return nil, fmt.Errorf("%T is no JSON object", s.v)
	}
	return append(fmt.Appendf(nil, `{"schemaVersion":%d,`, status.SchemaVersion), fields...), nil
}
