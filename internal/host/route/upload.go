// SPDX-License-Identifier: Apache-2.0

package route

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// upload is the body of a request that is passed on. A server may answer before it has read
// all, and then http.Server can neither keep the connection nor close it at once: it would
// take what follows for a request, or the client would lose the answer to a reset. A nil
// upload is that of a request without a body.
type upload struct {
	body  io.Reader
	ended atomic.Bool
}

// What a client sends after the answer is read and dropped for drainTime, up to drainMax bytes.
const (
	drainTime = time.Second
	drainMax  = 1 << 20
)

// newUpload returns the body of q, to be read while w is written. http.Server would otherwise
// take up to 256 KiB of it for itself when the answer begins. Trailers that no header has
// announced get a map, which is passed on before they are read.
func newUpload(w http.ResponseWriter, q *http.Request) *upload {
	if q.ContentLength == 0 {
		return nil
	}
	_ = http.NewResponseController(w).EnableFullDuplex()
	if q.Trailer == nil {
		q.Trailer = make(http.Header)
	}
	return &upload{body: q.Body}
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.body.Read(p)
	if errors.Is(err, io.EOF) {
		u.ended.Store(true)
	}
	return n, err
}

// whole reports whether the body has been read to its end.
func (u *upload) whole() bool { return u == nil || u.ended.Load() }

// answered is called before the head of the answer is written. It announces that the
// connection ends with it if the body has not ended.
func (u *upload) answered(w http.ResponseWriter) {
	if !u.whole() {
		w.Header().Set("Connection", "close")
	}
}

// finish is called after the answer.
func (u *upload) finish(w http.ResponseWriter, q *http.Request) {
	if u.whole() {
		return
	}
	c := http.NewResponseController(w)
	_ = c.Flush()
	_ = c.SetReadDeadline(time.Now().Add(drainTime))
	_, _ = io.CopyN(io.Discard, q.Body, drainMax)
}
