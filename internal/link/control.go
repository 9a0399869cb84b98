// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bufio"
	"context"
	"time"

	"github.com/fairlead/fairlead/internal/wire"
)

// control is a Control over a stream of the session.
type control struct {
	st *stream
	in *bufio.Reader
}

func newControl(st *stream) *control { return &control{st, bufio.NewReader(st)} }

func (c *control) Read(ctx context.Context) ([]byte, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.st.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	return wire.ReadControl(c.in)
}

func (c *control) Write(ctx context.Context, frame []byte) error {
	_ = c.st.SetWriteDeadline(time.Now().Add(wire.WriteTimeout))
	stop := context.AfterFunc(ctx, func() { _ = c.st.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := c.st.Write(frame)
	return err
}

func (c *control) Try(frame []byte) []byte { return frame }
