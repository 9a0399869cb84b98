// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"
)

func TestMethodInLogHasNoEmptyAttributes(t *testing.T) {
	for want, m := range map[string]Method{
		"level=INFO msg=m method=iter\n":                           {Name: MethodIter},
		"level=INFO msg=m capability=udp-dump method=iter\n":       {Capability: "udp-dump", Name: MethodIter},
		"level=INFO msg=m method=audit lost=peers\n":               {Name: "audit", Lost: "peers"},
		"level=INFO msg=m method=audit better=\"no BPF\"\n":        {Name: "audit", Err: errors.New("no BPF")},
		"level=INFO msg=m method=audit lost=peers better=fentry\n": {Name: "audit", Lost: "peers", Err: errors.New("fentry")},
	} {
		var b bytes.Buffer
		h := slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})
		slog.New(h).Info("m", m.LogAttr())
		if b.String() != want {
			t.Errorf("got %q, want %q", b.String(), want)
		}
	}
}
